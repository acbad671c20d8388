"""Job specs: what a YAML file may say, and the checks before a job starts."""
