"""`python -m penstock` is `penstock`: the server has the command line, and comes with the engine."""

from penstock_server.cli import main

raise SystemExit(main())
