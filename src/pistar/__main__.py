"""`python -m pistar`, as `pistar`."""

from pistar.cli import main

if __name__ == "__main__":
    main()
