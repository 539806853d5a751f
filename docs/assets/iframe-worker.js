// Browsers start no worker from a file: pages that are opened as files run the script of one, which searches, in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.inside = new Promise(resolve => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow;
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
          const script = inside.document.createElement("script");
          script.src = url;
          script.addEventListener("load", () => resolve(inside));
          inside.document.body.append(script);
        }, {once: true});
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.inside.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", {data})));
    }
  };
}
