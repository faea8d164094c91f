"""The commands of the console script `seerjax`, a file each; `flags` gives them their fields."""
