"""KTO from a file: training to sort on recorded answers with labels, without sampling."""
