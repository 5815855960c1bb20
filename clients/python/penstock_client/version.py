"""The version of this package, and the name that the client sends as User-Agent."""

__version__ = "0.1.0"
USER_AGENT = f"penstock-client/{__version__}"
