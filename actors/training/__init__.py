"""What a Train worker does (trainer.py), and what it stands on: rows, ranks, ZeRO, checkpoints, run files."""
