"""`python -m tpuemb_torch.cli`."""

from tpuemb_torch.cli import main

if __name__ == "__main__":
    main()
