# Made from _async/__init__.py by make_sync.py; edit that.
