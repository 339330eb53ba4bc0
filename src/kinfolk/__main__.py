"""`python -m kinfolk` is the command line."""

from kinfolk.cli import main

if __name__ == "__main__":
    main()
