"""From what a run wrote down to what happened: accounting of device time, trace and report, from run folders."""
