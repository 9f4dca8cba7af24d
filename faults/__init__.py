"""Injects faults into real runs, and records what was lost or came out wrong: see campaign.py."""
