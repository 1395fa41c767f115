"""Points -> outcomes: what every study asks for its runs."""
