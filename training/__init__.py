"""How the reference models were made; nothing of it is in the package that users install."""
