"""`python -m gateway.cli`: the console script, where its folder may not be on the path."""

from gateway.cli import main

if __name__ == "__main__":
    main()
