"""The command line: info, explain, check. Needs ``convgrad[cli]``; see ``convgrad --help``."""
