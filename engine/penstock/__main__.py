"""`python -m penstock` is `penstock`: the server has the command line, and comes with the engine."""

from penstock_server.start import main

raise SystemExit(main())
