"""By hand, in JupyterLab: profile any callable; choose a case and see what is known of it.

| module | holds |
|---|---|
| `profile`, `compare`, `magic` | what a callable ran; two of them; `%%attn_profile` |
| `choices` | what was chosen of a named model, and the call that chooses it again |
| `sources` | who answers, the records of a study or this GPU; what can be chosen next |
| `tables`, `view` | numbers, and their card and figure; `view` is the whole of it in one call |
| `sweep` | measures what a view lacks, and can be stopped |
| `widgets` | `explore`: controls over `view`, and nothing that it cannot do |

Nothing but taking a profile, `sweep` and `widgets` needs more than a laptop: no torch, no GPU.
"""
