"""What runs on devices: steps and their calls, placed arguments, data."""
