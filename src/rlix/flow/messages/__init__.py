"""Messages between workers of any groups, and batches that are cut anew on the way from some ranks to others."""
