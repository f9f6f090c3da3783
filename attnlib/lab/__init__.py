"""The explorer: choose a case, see what is known of it, and on a GPU measure what is not.

| module | holds |
|---|---|
| `shapes` | models by name, and what a record's case is to one |
| `choices` | what was chosen, and the call that chooses it again |
| `sources` | who answers: the records of a study, or this GPU |
| `narrow` | what can be chosen next, and what is, where nothing was asked |
| `rules` | which backend a library's rules pick |
| `tables`, `words`, `picture` | what a view shows: numbers, the same in words, a figure |
| `views` | the view; `view` is the whole of it in one call |
| `sweep` | measures what a view lacks, and can be stopped |
| `widgets` | `explore`: controls over `view`, and nothing that it cannot do |

Nothing but `sweep` and `widgets` needs more than a laptop: no torch, no GPU.
"""
