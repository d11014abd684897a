"""`python -m tokenformer` is the command `tokenformer`, for torchrun and other launchers."""

from tokenformer.cli import main

if __name__ == "__main__":
    main()
