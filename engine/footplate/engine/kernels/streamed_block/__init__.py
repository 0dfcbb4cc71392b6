"""Everything between two attentions of a decode step as one kernel."""
