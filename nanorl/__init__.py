"""nanorl: RL post-training for language models. Importing it is cheap: no torch before a command needs it."""

__version__ = "0.1.0"
