"use strict";
/* Enter shows the next place with all the words, one after the other; folded code opens. */
const form = document.querySelector("search form");
const [box] = form.elements, told = form.querySelector("output");
const blocks = [..."p li tr pre h2 h3 h4 h5".split(" ").map(tag => `main ${tag}`)].join();
let asked = "", places = [], place = -1;
form.hidden = false;
form.onsubmit = event => {
  event.preventDefault();
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  places[place]?.classList.remove("found");
  if (words.join(" ") !== asked) {
    asked = words.join(" ");
    const has = each => words.every(word => each.textContent.toLowerCase().includes(word));
    const found = words.length ? [...document.querySelectorAll(blocks)].filter(has) : [];
    places = found.filter(each => !found.some(other => other !== each && each.contains(other)));
    place = -1;
  }
  place = places.length ? (place + 1) % places.length : -1;
  const here = places[place];
  const number = here?.closest("section.notebook")?.id.slice(0, 2);
  told.textContent = here ? `${place + 1} of ${places.length}${number ? `, ${number}` : ""}` : words.length ? "none" : "";
  for (let fold = here?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  here?.classList.add("found");
  here?.scrollIntoView({ block: "center" });
};
