"""Train a small Mixture-of-Experts model of a published routing shape and record how it routes.

The chain, each step a module: `corpus` (packages -> documents), `tokens` (documents -> byte-level BPE ids), `model`
(tiny configurations of Hugging Face classes), `fast` (their forward, quick to train), `train`, `evaluate` (held-out
loss against n-gram baselines, expert load, gate reuse), `record` (routing of generated requests), `to_trace` (the file
that ships). `trainer` is a run: its rates (`schedule`), its experts' balance (`balance`), what it begins from (`grow`,
`upcycle`), what it resumes from (`state`) and its log (`log`). Requests of chat length go another way: `chat` draws
them, `moesim record` runs them, `pack` stores them in few bits. torch, transformers and tokenizers are imported at the
top of these modules. `traces.record.checkpoint` reads what is trained.
"""
