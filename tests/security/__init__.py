"""What other users and damaged bytes can do: see docs/explanation/threat-model.md."""
