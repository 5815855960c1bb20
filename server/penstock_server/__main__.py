"""`python -m penstock_server` is `penstock`."""

from penstock_server.cli import main

raise SystemExit(main())
