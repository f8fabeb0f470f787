"""Learning to sort from recorded answers with a label each: KTO from a file, without sampling."""
