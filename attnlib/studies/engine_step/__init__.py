"""Does a fix reach the user of an engine? Steps of SGLang, arm against arm."""
