"""`python -m llmgw`."""

from llmgw.cli import main

if __name__ == "__main__":
    main()
