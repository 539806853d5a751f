// Each text is one stop of the Tab key; arrow keys, Home and End move among its tokens.

for (const text of document.querySelectorAll(".tokens-view .text")) {
  const tokens = [...text.querySelectorAll("span[tabindex]")];
  const choose = token => tokens.forEach(each => each.tabIndex = each === token ? 0 : -1);
  choose(tokens[0]);
  text.addEventListener("focusin", event => choose(event.target));
  text.addEventListener("keydown", event => {
    const i = tokens.indexOf(event.target);
    const next = {ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: tokens.length - 1}[event.key];
    if (i < 0 || !tokens[next]) return;
    event.preventDefault();
    tokens[next].focus();
  });
}
