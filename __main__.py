"""`python -m compress_llm`: the same as the console command `compress`."""

from .compress_cli.main import main

if __name__ == "__main__":
    main()
