"""A fake engine: a real process that speaks just enough HTTP to stand in for an inference server, and fails on demand.

Run it as `python -m llmgw.testing.fake_engine …` or by the path of this directory; it needs nothing outside the
standard library.

Flags of an ordinary engine:
    --host, --port            where to listen (default 127.0.0.1, required port)
    --alias NAME              model name in answers and in `/v1/models`
    --model PATH              must be a readable file, else the last words of an engine and exit 1
    --api-key-file FILE       requests need `Authorization: Bearer KEY`, except `/health` and `/fake/*`
    --slots N                 requests generated in parallel, others wait (default 4)
    --tokens N                tokens per answer when the request has no `max_tokens` (default 8)
    --token-interval S        seconds between tokens (default 0)
    --load-seconds S          listens at once and answers 503 `Loading model` this long, logging progress
    --quiet-load              does not log while loading
    --burn-cpu                uses about a fifth of a core, as at work on a long prompt
    --log-tokens              logs `sent t<i>` after each token that was handed to the kernel

Failure flags:
    --crash-at-start CODE     prints its last words and exits with CODE; negative: kills itself by that signal
    --crash-after-tokens N    ends in the middle of an answer after N tokens over its whole life
    --crash-code CODE         how that ends (default 1; negative: a signal)
    --answer-status N         generation requests get this status and an OpenAI-shaped error
    --hang-health             accepts `/health` and never answers
    --never-bind              runs and never listens
    --ignore-term             SIGTERM is logged and ignored
    --flood N                 logs N numbered lines (`flood 0`, `flood 1`, …) per second
    --grandchild              starts a child in a session of its own that lives until killed

The tokens are numbered: `t0 t1 t2 …` (each chunk `"t<i> "`), so a reader can prove that none is missing or doubled.
`stream: true` ends with a finish chunk, with `stream_options.include_usage` a chunk of `usage` and `timings`, then
`data: [DONE]`. Endpoints: `/health`, `/props`, `/v1/models`, `/metrics`, `/v1/chat/completions`, `/v1/completions`,
`/v1/embeddings`.

`GET /fake/stats` answers `{pid, requests: {path: n}, in_flight, max_in_flight, tokens, finished, client_disconnects,
last: {path, headers, body}}`. `POST /fake/set` with JSON changes it while it runs: `hang_health`, `answer_status`,
`token_interval`, `loading` (true: 503 again), `crash` (exit code, at once).

SIGTERM: stops accepting, exits 0 when the open requests are done; a second one exits 1 at once.
"""
