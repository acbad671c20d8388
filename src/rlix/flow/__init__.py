"""The substrate: worker groups, channels, and workers that start by fork."""
