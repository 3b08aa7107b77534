"""`python -m simplellm` is the command `simplellm`."""

from simplellm.cli import main

raise SystemExit(main())
