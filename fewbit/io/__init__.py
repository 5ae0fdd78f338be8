"""Files: reading and writing checkpoints, ours and other people's."""
