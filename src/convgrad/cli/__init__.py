"""The command ``convgrad``, which needs ``convgrad[cli]``; ``convgrad --help`` lists what it does."""
