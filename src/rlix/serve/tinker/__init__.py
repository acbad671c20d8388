"""A server that Tinker's client trains and samples on."""
