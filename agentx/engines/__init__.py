"""Engines: real ones to replay against where there is no hardware."""
