"""What is true on one machine, whatever the control plane thinks: who locks its devices, which processes live."""
