"""The words RLix speaks: phases, names, messages, events and errors. Imports nothing else of rlix."""
