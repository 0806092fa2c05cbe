"""SFT data: reads, filters, renders, masks, samples and packs conversations, and reports on them."""
