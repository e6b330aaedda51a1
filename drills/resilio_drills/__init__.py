"""What is drilled: a small GPT and the loops that train it, written to be read, run and copied.

- `model.py`: the byte-level GPT, one file;
- `data.py`: the corpus that every machine has, and a sampler whose position can be saved;
- `train.py`: one training loop for one process, DDP and FSDP2, with checkpoints;
- `demo.py`: train on 2 ranks, be killed inside a save, resume on 1 rank.
"""
