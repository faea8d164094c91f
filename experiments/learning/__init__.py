"""Training runs: nano from nothing, and a pretrained model compared with TRL."""
