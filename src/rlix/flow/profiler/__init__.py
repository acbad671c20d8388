"""What the parts of a flow cost here: measured, and kept."""
