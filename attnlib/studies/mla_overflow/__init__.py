"""At which token FlashInfer 0.6.4 MLA reads others."""
