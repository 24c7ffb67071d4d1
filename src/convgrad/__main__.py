"""``python -m convgrad``: the command ``convgrad``, after the package's own imports."""

from convgrad_command import main

if __name__ == "__main__":
    main()
