"""Worker groups: ranks of one class, each an actor on its devices."""
