"""Finding out what a node is: one fact per file, a pure parser and a thin runner each."""
