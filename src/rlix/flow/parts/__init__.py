"""What runs the parts of a flow: workers whose state comes and goes, in turns."""
