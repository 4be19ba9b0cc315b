"""Shared test machinery."""
