"""The version of this distribution, and the name by which the server's log knows it."""

__version__ = "0.1.0"
USER_AGENT = f"penstock-client/{__version__}"
