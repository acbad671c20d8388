"""The HTTP API: who asks, what may be asked, and what is answered."""
