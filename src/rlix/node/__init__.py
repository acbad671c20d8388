"""What is true on one machine, whatever the control plane thinks: who locks devices and files, which processes live."""
