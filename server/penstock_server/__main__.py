"""`python -m penstock_server` is `penstock`."""

from penstock_server.start import main

raise SystemExit(main())
